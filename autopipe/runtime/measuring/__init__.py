"""What layers, devices and links cost: timed, counted or computed.

profiling    ``autopipe.profile``
measure      time every layer as it will run
sampling     which of equal layers are run
curves       micro-batch sizes that need not be measured
unit_bytes   what layers hold, make and need besides
analytic     costs that are computed, for a device that need not be here
operations   the arithmetic and traffic of a model's operations
roofline     this machine's own speeds, in place of a data sheet
links        devices and the links between them
"""
