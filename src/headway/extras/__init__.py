"""Optional training features, such as spike and NaN guards, throughput meters, local SGD and memory reports."""
