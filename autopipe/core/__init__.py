"""The nouns of autopipe as plain data. Nothing here imports torch or runs anything that it reads."""
