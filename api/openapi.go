package api

import (
	"context"
	"net/http"

	"github.com/danielgtaylor/huma/v2"

	"github.com/doze-run/doze/docs"
	"github.com/doze-run/doze/problem"
)

const (
	openAPIPath    = "/openapi.json"
	securityScheme = "token"
	// signatureScheme is the scheme of routes that accept signed URLs.
	signatureScheme = "signature"
	// codesExtension lists an operation's problem codes in the document.
	codesExtension = "x-problem-codes"
)

// registerOpenAPI adds the document's own route.
func (a *API) registerOpenAPI() {
	register(a, route{
		method: http.MethodGet, path: openAPIPath, id: "openapi", tag: "node", open: true,
		summary: "The OpenAPI 3.1 document", description: "Needs no token.",
		codes: []problem.Code{problem.URITooLong, problem.RequestInvalid},
		responses: map[int]*huma.Response{http.StatusOK: {
			Description: "The document",
			Content:     map[string]*huma.MediaType{"application/json": {Schema: &huma.Schema{Type: huma.TypeObject}}},
		}},
	}, func(context.Context, *struct{}) (*bytesOutput, error) {
		return &bytesOutput{ContentType: "application/json", Body: docs.OpenAPI}, nil
	})
}
