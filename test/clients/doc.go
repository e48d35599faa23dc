// Package clients checks the OpenAPI document with the tools that users have for it: a
// linter, and generators of clients for TypeScript and Go. Its tests have the build tag
// clients, because they download those tools.
package clients
