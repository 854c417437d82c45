"""Commands: parse, call once, print, exit. Only this package imports click; it imports torch when a command runs."""
