package main

import (
	"bufio"
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"strings"

	"github.com/doze-run/doze/cmd/internal/jsonfile"
)

// recorded is a request in a file, with the policy's configuration and secrets.
type recorded struct {
	recordedRequest
	Config   json.RawMessage   `json:"config"`
	Secrets  map[string]string `json:"secrets"`
	Sandbox  recordedSandbox   `json:"sandbox"`
	Response recordedResponse  `json:"response"` // of the host; 200 without a body unless given
}

type recordedRequest struct {
	Method  string         `json:"method"`
	URL     string         `json:"url"`
	Headers recordedHeader `json:"headers"`
	Body    string         `json:"body"`
}

type recordedSandbox struct {
	ID     string            `json:"id"`
	Name   string            `json:"name"`
	Owner  string            `json:"owner"`
	Labels map[string]string `json:"labels"`
}

type recordedResponse struct {
	Status  int            `json:"status"`
	Headers recordedHeader `json:"headers"`
	Body    string         `json:"body"`
}

// recordedHeader has one text or several for a name.
type recordedHeader http.Header

func (h *recordedHeader) UnmarshalJSON(text []byte) error {
	var fields map[string]json.RawMessage
	if err := json.Unmarshal(text, &fields); err != nil {
		return err
	}
	*h = recordedHeader{}
	for name, raw := range fields {
		var one string
		var several []string
		switch {
		case json.Unmarshal(raw, &one) == nil:
			several = []string{one}
		case json.Unmarshal(raw, &several) != nil:
			return fmt.Errorf("header %s is text or a list of texts", name)
		}
		for _, value := range several {
			http.Header(*h).Add(name, value)
		}
	}
	return nil
}

// readRecorded reads a request: JSON, or as it is in HTTP/1.1.
func readRecorded(file string) (*recorded, error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	r := &recorded{}
	if bytes.HasPrefix(bytes.TrimSpace(text), []byte("{")) {
		err = jsonfile.Decode(text, r)
	} else {
		err = r.readHTTP(text)
	}
	if err == nil {
		err = r.check()
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	return r, nil
}

// readHTTP reads a request as it is on a connection, to the host that it names.
func (r *recorded) readHTTP(text []byte) error {
	request, err := http.ReadRequest(bufio.NewReader(bytes.NewReader(text)))
	if err != nil {
		return fmt.Errorf("neither JSON nor an HTTP/1.1 request: %w", err)
	}
	body, err := io.ReadAll(request.Body)
	if err != nil {
		return err
	}
	request.URL.Scheme, request.URL.Host = cmp.Or(request.URL.Scheme, "https"), request.Host
	r.recordedRequest = recordedRequest{request.Method, request.URL.String(), recordedHeader(request.Header), string(body)}
	return nil
}

func (r *recorded) check() error {
	r.Method = cmp.Or(r.Method, "GET")
	r.Response.Status = cmp.Or(r.Response.Status, http.StatusOK)
	u, err := url.Parse(r.URL)
	switch {
	case err != nil:
		return err
	case u.Host == "" || u.Scheme != "https" && u.Scheme != "http":
		return errors.New(`"url" has a scheme and a host, like https://api.example.com/user`)
	case r.Response.Status < 200 || r.Response.Status > 599:
		return errors.New(`the response's "status" is 200 to 599`)
	}
	return nil
}

// request is a new one each time.
func (r *recorded) request() (*http.Request, error) {
	request, err := http.NewRequest(r.Method, r.URL, strings.NewReader(r.Body))
	if err != nil {
		return nil, err
	}
	if r.Headers != nil {
		request.Header = http.Header(r.Headers).Clone()
	}
	if host := request.Header.Get("Host"); host != "" {
		request.Host = host
		request.Header.Del("Host")
	}
	if len(r.Body) > 0 {
		request.Header.Set("Content-Length", fmt.Sprint(len(r.Body)))
	}
	request.RequestURI = request.URL.RequestURI()
	request.RemoteAddr = "198.18.0.2:40000" // a sandbox's
	return request, nil
}
