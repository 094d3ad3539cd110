"""Any text in; blocks of tokens, their loss masks and held-out blocks out."""
