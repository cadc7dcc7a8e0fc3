"""`python -m fourfold`, which is also how torchrun starts it."""

from fourfold.cli import main

if __name__ == "__main__":
    main()
