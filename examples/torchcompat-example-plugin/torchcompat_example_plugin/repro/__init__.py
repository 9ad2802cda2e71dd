"""The programs that prove the patches."""
