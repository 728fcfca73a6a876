"""What a machine can do. Other rooms see `brickline.device.base` alone."""
