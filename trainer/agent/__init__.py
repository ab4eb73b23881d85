"""The light process that supervises one worker or server."""
