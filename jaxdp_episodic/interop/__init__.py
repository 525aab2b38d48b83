"""Bridges to other libraries; each module requires the library it is named after."""
