"""What the processes of a job say to each other: typed messages, and nothing that acts on them."""
