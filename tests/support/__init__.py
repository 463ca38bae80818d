"""Helpers of the tests: starting ranks, and recording what each of them did."""
