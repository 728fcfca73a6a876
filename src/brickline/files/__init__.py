"""Files as a caller names them, and as a disk holds them: whole or not at all."""
