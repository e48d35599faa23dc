package api

import (
	"context"
	"net/http"
	"sync"

	"github.com/danielgtaylor/huma/v2"

	"github.com/doze-run/doze/problem"
)

const (
	openAPIPath    = "/openapi.json"
	securityScheme = "token"
	// codesExtension lists an operation's problem codes in the document.
	codesExtension = "x-problem-codes"
)

// newDocument returns the OpenAPI document, without routes yet.
func (a *API) newDocument() *huma.OpenAPI {
	return &huma.OpenAPI{
		OpenAPI: "3.1.0",
		Info: &huma.Info{
			Title:       "doze",
			Version:     documentVersion,
			Description: "Sandboxes that sleep until someone knocks. Errors are problem documents (RFC 9457) with a stable `code`.",
			License:     &huma.License{Name: "Apache-2.0", Identifier: "Apache-2.0"},
		},
		Servers: []*huma.Server{{URL: Prefix}},
		Tags:    tags,
		Components: &huma.Components{
			Headers: responseHeaders,
			Schemas: newSchemas(),
			SecuritySchemes: map[string]*huma.SecurityScheme{
				securityScheme: {Type: "http", Scheme: "bearer", Description: "The node's token."},
			},
		},
	}
}

// registerOpenAPI adds the document's own route, last. The first request for the
// document writes it.
func (a *API) registerOpenAPI() {
	document := sync.OnceValues(a.document)
	register(a, route{
		method: http.MethodGet, path: openAPIPath, id: "openapi", tag: "node", open: true,
		summary: "The OpenAPI 3.1 document", description: "Needs no token.",
		codes: []problem.Code{problem.URITooLong, problem.RequestInvalid},
		responses: map[int]*huma.Response{http.StatusOK: {
			Description: "The document",
			Content:     map[string]*huma.MediaType{"application/json": {Schema: &huma.Schema{Type: huma.TypeObject}}},
		}},
	}, func(context.Context, *struct{}) (*bytesOutput, error) {
		text, err := document()
		if err != nil {
			return nil, err
		}
		return &bytesOutput{ContentType: "application/json", Body: text}, nil
	})
}
