"""``python -m paddlewheel.deploy.cli`` is the same as ``paddlewheel``."""

from paddlewheel.deploy.cli import main

if __name__ == "__main__":
    main()
