// Package types declares what the HTTP API sends and receives: the server and the
// client share it. Types have the names of their schemas in the OpenAPI document,
// and the tag doc is the documentation of a field.
//
// Values of an enumeration are not a closed list for clients: a newer node has more.
// Values returns the values of this version. Constants are named after their type.
package types
