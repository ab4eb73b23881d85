"""Container images: see Dockerfile. `lock` pins what goes into them, `healthcheck` answers for a running one."""
