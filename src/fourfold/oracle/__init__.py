"""What a program costs before it runs. No torch."""
