"""What is looked at while a run trains: wrong use, drifting replicas, values that are not finite."""
