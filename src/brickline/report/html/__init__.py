"""HTML reports: one file a report, self-contained, that opens offline. Each module owns one page.

`page` owns the shell that every page stands in; `assets` holds its styles and scripts.
"""
