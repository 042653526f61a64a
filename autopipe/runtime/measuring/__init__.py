"""What layers cost, and what devices and links are like: timed, counted or computed."""
