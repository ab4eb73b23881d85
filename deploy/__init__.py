"""What starts the roles: the command line and the launchers."""
