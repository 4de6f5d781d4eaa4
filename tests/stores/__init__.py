"""Helpers for tests with object stores: a local S3 server, and a proxy in front of it that makes requests fail."""
