"""Routing traces and the training of expert predictors on them."""
