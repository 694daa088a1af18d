"""What server and clients of a federation say to each other around the rounds, without any I/O."""
