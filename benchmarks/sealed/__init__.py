"""Ports of models by strangers, each with faults that are known: sets that are scored once.

Every set is written by somebody who has not read brickline, and is committed before it is scored.
"""
