"""What strangers may send: strategies of broken input, and who has to survive it."""
