"""Commands: parse, call once, print, exit. Only here is click, and only when a command runs is torch imported."""
