package api

import (
	"context"
	"net/http"

	"github.com/danielgtaylor/huma/v2"
)

const pemType = "application/x-pem-file"

type bundleOutput struct {
	ContentType string `header:"Content-Type"`
	Body        []byte
}

func (a *API) registerTrust() {
	register(a, route{
		method: http.MethodGet, path: "/egress/ca", id: "get-egress-ca", tag: "egress",
		summary:     "Get the certificates of the node's certificate authority, in PEM",
		description: "Sandboxes trust them already. Images and clients with a trust store of their own need them.",
		responses:   map[int]*huma.Response{http.StatusOK: responseBytes("The certificates", pemType)},
	}, func(context.Context, *struct{}) (*bundleOutput, error) {
		return &bundleOutput{ContentType: pemType, Body: a.cfg.Egress.Trust()}, nil
	})
}
