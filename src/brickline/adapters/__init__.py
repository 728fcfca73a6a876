"""What other libraries make, in brickline's own terms."""
