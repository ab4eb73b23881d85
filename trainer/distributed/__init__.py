"""The trainers' process group: all-reduce, compression, NCCL."""
