"""Other libraries' names, served by Headway's own parts."""
