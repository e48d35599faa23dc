package api

import (
	"bytes"
	"encoding/json"
	"io"
	"net/http"

	"github.com/danielgtaylor/huma/v2"
)

// output is a response with a JSON body.
type output[T any] struct{ Body T }

// bytesOutput is a response with a raw body.
type bytesOutput struct {
	ContentType string `header:"Content-Type"`
	Body        []byte
}

func respond[T any](body T) (*output[T], error) { return &output[T]{body}, nil }

// jsonResponse is a response with a JSON body, for routes that may also respond with something
// else.
func jsonResponse(x Exchange, body any) *huma.StreamResponse {
	return &huma.StreamResponse{Body: func(huma.Context) {
		x.w.Header().Set("Content-Type", "application/json")
		if err := jsonFormat.Marshal(x.w, body); err != nil {
			panic(err) // nothing was written
		}
	}}
}

// createdResponse is a jsonResponse with the new resource at a location.
func createdResponse(x Exchange, location string, body any) *huma.StreamResponse {
	return &huma.StreamResponse{Body: func(huma.Context) {
		h := x.w.Header()
		h.Set("Content-Type", "application/json")
		h.Set("Location", location)
		x.w.WriteHeader(http.StatusCreated)
		if err := jsonFormat.Marshal(x.w, body); err != nil {
			panic(err)
		}
	}}
}

// jsonFormat writes responses in one piece. The error of a write is ignored: the client
// has disconnected.
var jsonFormat = huma.Format{
	Marshal: func(w io.Writer, v any) error {
		var buf bytes.Buffer
		enc := json.NewEncoder(&buf)
		enc.SetEscapeHTML(false)
		if err := enc.Encode(v); err != nil {
			return err
		}
		w.Write(buf.Bytes())
		return nil
	},
	Unmarshal: json.Unmarshal,
}
