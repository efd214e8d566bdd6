"""What every rank did when: recorded, put on one clock, drawn, and searched for who makes it slow."""
