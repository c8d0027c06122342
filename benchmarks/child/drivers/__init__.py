"""What is done to a contender: timed alone, handed over, crowded, held for minutes."""
