"""Exports: a run in the forms that other tools read. Each module owns one form or one way out.

`spans` and `nesting` prepare what has a place in time, `wire` writes protobuf by hand, `target`
puts files into their place. It reads runs and profiles; nothing that records or compares sees it.
"""
