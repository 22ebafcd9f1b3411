// Package pydantic says whether a JSON value is one that a model of Python's pydantic accepts.
//
// Engines declare their requests as pydantic models, and refuse what does not fit. What pydantic knows of a model (types,
// bounds, names, what is required) is written to a file by the engine's own Python (e2e/engines/schemas.py); this package
// follows such a file, with pydantic's lax conversions: "1" is an integer, "yes" is true, 1.0 is 1, and so on.
//
//	set, err := pydantic.Load(file)
//	err = set.Schema("chat").Check(body) // *Error names the place and the reason
//
// It works on checked JSON bytes, builds no values, and is safe for concurrent use. Functions that the engine runs beside
// the declared types are given by name (Functions); unknown ones are passed over.
package pydantic
