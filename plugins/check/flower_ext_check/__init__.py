"""A second opinion on any Flower app: run it, watch each message, say which privacy is provable.

The check runs the app's code with the rights of the user, as Flower would. It finds mistakes, but a
malicious app can deceive it. A measurement can only refute a claim. A proof needs a mechanism
whose code the check knows and whose parameters it reads from the live objects.

In the modules of the check, *this package* is `flower_ext`.
"""
