// Package docs has the OpenAPI document of the HTTP API, which nodes serve.
package docs

import _ "embed"

// OpenAPI is the document. Package api generates it from its routes: `make openapi`.
//
//go:embed openapi.json
var OpenAPI []byte
