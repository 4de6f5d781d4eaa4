"""Votes, agreements and notices among ranks, over a store of their own."""
