"""`torchcompat doctor`: one page on what is here, what is wrong with it, and what to do next."""
