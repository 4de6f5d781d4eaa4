"""From a user's DataLoader to the prepared one: order, shards, padding as a mask, position."""
