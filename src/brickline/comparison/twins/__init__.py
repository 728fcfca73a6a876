"""What float64 twins say of two runs; `with_twins` puts it into a report."""

from brickline.comparison.twins.reading import with_twins

__all__ = ["with_twins"]
