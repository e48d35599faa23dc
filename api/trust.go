package api

import (
	"context"
	"net/http"

	"github.com/danielgtaylor/huma/v2"
)

const pemType = "application/x-pem-file"

func (a *API) registerTrust() {
	register(a, route{
		method: http.MethodGet, path: "/egress/ca", id: "get-egress-ca", tag: "egress",
		summary:     "Get the certificates of the node's certificate authority, in PEM",
		description: "Sandboxes trust them already. Images and clients with a trust store of their own need them.",
		responses:   map[int]*huma.Response{http.StatusOK: responseBytes("The certificates", pemType)},
	}, func(context.Context, *struct{}) (*bytesOutput, error) {
		return &bytesOutput{ContentType: pemType, Body: a.cfg.Egress.Trust()}, nil
	})
}
