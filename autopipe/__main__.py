"""``python -m autopipe``."""

from autopipe.cli import main

if __name__ == "__main__":
    main()
