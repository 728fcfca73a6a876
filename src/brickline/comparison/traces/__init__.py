"""The seed's comparison of launches by kernel, layer and position."""
