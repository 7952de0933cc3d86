"""Buckets, overlap, and how a bucket is reduced; the one place codec meets collective."""
