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
		summary:     "The certificates of the node's own authority, in PEM",
		description: "Sandboxes trust them already. They are for images and clients that bring their own list of whom to trust.",
		answers:     map[int]*huma.Response{http.StatusOK: answerBytes("The certificates", pemType)},
	}, func(context.Context, *struct{}) (*bundleOutput, error) {
		return &bundleOutput{ContentType: pemType, Body: a.egress.Bundle()}, nil
	})
}
