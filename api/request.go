package api

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"maps"
	"mime"
	"net"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/danielgtaylor/huma/v2"
	"github.com/danielgtaylor/huma/v2/adapters/humago"

	"github.com/doze-run/doze/problem"
)

// bodySchemaKey is where an operation's Metadata keeps the schema of its body.
const bodySchemaKey = "body_schema"

// jsonFormat writes answers in one piece. A client that has gone is no failure
// of ours: the write's error is for nobody.
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

// writeJSON answers outside of huma, as huma would.
func writeJSON(w http.ResponseWriter, status int, v any) error {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	return jsonFormat.Marshal(w, v)
}

// readJSON reads the body of a request before huma does, so that each way in
// which it can be wrong has a code of its own.
func (a *API) readJSON(most int64) func(huma.Context, func(huma.Context)) {
	return func(ctx huma.Context, next func(huma.Context)) {
		r, w := humago.Unwrap(ctx)
		body, err := a.jsonBody(w, r, most)
		if err != nil {
			problemOf(r.Context(), err).Write(w, r)
			return
		}
		schema := ctx.Operation().Metadata[bodySchemaKey].(*huma.Schema)
		if err := a.checkNames(schema, body); err != nil {
			problemOf(r.Context(), err).Write(w, r)
			return
		}
		r.Body = io.NopCloser(bytes.NewReader(body))
		r.Header.Set("Content-Type", "application/json") // huma reads parameters of it in its own way
		next(ctx)
	}
}

// refuseBody keeps a route without a body from ignoring one: whoever sends it
// wants something. An empty object asks for nothing. Of a body whose length is
// not known, which in HTTP/3 is each request's, only reading it tells whether it
// is there.
func (a *API) refuseBody(ctx huma.Context, next func(huma.Context)) {
	r, w := humago.Unwrap(ctx)
	if r.ContentLength == 0 {
		next(ctx)
		return
	}
	body, err := a.readBody(w, r, maxJSON, asRaw)
	if err == nil && len(body) > 0 {
		err = checkType(r)
		if err == nil && string(bytes.TrimSpace(body)) != "{}" {
			err = invalid("body", "this route has no fields", "send no body")
		}
	}
	if err != nil {
		problemOf(r.Context(), err).Write(w, r)
		return
	}
	next(ctx)
}

// checkQuery refuses parameters that would be ignored: the second of two, and one
// without a value. An empty cursor is that of the first page.
func (a *API) checkQuery(ctx huma.Context, next func(huma.Context)) {
	r, w := humago.Unwrap(ctx)
	query := r.URL.Query()
	for _, p := range ctx.Operation().Parameters {
		values := query[p.Name]
		var fault *problem.Problem
		switch {
		case p.In != "query" || len(values) == 0 || p.Schema.Type == huma.TypeArray:
			continue
		case len(values) > 1:
			fault = invalid("query."+p.Name, "it is there more than once", "send it once")
		case values[0] == "" && p.Name != "cursor":
			fault = invalid("query."+p.Name, "it has no value", "give it one, or leave it away")
		}
		if fault != nil {
			fault.Write(w, r)
			return
		}
	}
	next(ctx)
}

// checkNames refuses fields of a body that would be ignored: the first of two with
// the same name, and those that huma and encoding/json take for another because
// they differ in case only. What is no JSON is for others to say.
func (a *API) checkNames(schema *huma.Schema, body []byte) error {
	if !json.Valid(body) {
		return nil
	}
	return a.checkValue(json.NewDecoder(bytes.NewReader(body)), "body", schema)
}

// checkValue reads one value and refuses names that are there twice in one object,
// and those that the schema has in another case. Where the schema says nothing it is
// nil. Every level below keeps its location, so that is clipped.
func (a *API) checkValue(dec *json.Decoder, location string, schema *huma.Schema) error {
	token, err := dec.Token()
	if err != nil {
		return nil
	}
	if schema != nil {
		schema = a.resolve(schema)
	}
	switch token {
	case json.Delim('['):
		var items *huma.Schema
		if schema != nil {
			items = schema.Items
		}
		for i := 0; dec.More(); i++ {
			if err := a.checkValue(dec, clip(location+"["+strconv.Itoa(i)+"]"), items); err != nil {
				return err
			}
		}
		dec.Token()
	case json.Delim('{'):
		seen := map[string]bool{}
		for dec.More() {
			token, err := dec.Token()
			name, ok := token.(string)
			if err != nil || !ok {
				return nil
			}
			if seen[name] {
				return invalid(clip(location+"."+clip(name)), "it is there more than once", "send it once")
			}
			seen[name] = true
			field, err := fieldOf(schema, location, name)
			if err != nil {
				return err
			}
			if err := a.checkValue(dec, clip(location+"."+clip(name)), field); err != nil {
				return err
			}
		}
		dec.Token()
	}
	return nil
}

// fieldOf returns the schema of a field, or nil, and refuses a name that the schema
// has in another case.
func fieldOf(schema *huma.Schema, location, name string) (*huma.Schema, error) {
	if schema == nil {
		return nil, nil
	}
	if field := schema.Properties[name]; field != nil {
		return field, nil
	}
	for field := range schema.Properties {
		if strings.EqualFold(field, name) {
			return nil, invalid(clip(location+"."+clip(name)), "unknown field",
				"the fields are "+strings.Join(slices.Sorted(maps.Keys(schema.Properties)), ", "))
		}
	}
	return nil, nil
}

// jsonBody returns a body of at most `most` bytes that says it is JSON.
func (a *API) jsonBody(w http.ResponseWriter, r *http.Request, most int64) ([]byte, error) {
	if err := checkType(r); err != nil {
		return nil, err
	}
	body, err := a.readBody(w, r, most, asRaw)
	switch {
	case err != nil:
		return nil, err
	case len(body) == 0:
		return nil, problem.New(problem.JSONInvalid, "the body is empty; send a JSON object")
	case !utf8.Valid(body):
		return nil, problem.New(problem.JSONInvalid, "the body is not UTF-8; JSON is (RFC 8259)")
	}
	return body, nil
}

// asRaw is the remedy for a JSON body that is too large.
const asRaw = "send files as raw bytes"

// readBody returns a body of at most `most` bytes. want is the remedy for more.
func (a *API) readBody(w http.ResponseWriter, r *http.Request, most int64, want string) ([]byte, error) {
	if r.ContentLength > most {
		return nil, tooLarge(most, want)
	}
	var body bytes.Buffer
	body.Grow(int(max(0, r.ContentLength)) + bytes.MinRead) // or it is read into one buffer after another
	_, err := body.ReadFrom(io.LimitReader(newTimedBody(w, r.Body, a.limits.Stall), most+1))
	switch {
	case err != nil:
		return nil, bodyProblem(err)
	case int64(body.Len()) > most:
		return nil, tooLarge(most, want)
	}
	return body.Bytes(), nil
}

// checkType refuses a body that says it is no JSON.
func checkType(r *http.Request) error {
	if header := r.Header.Get("Content-Type"); header != "" && !isJSON(header) {
		return problem.Newf(problem.MediaTypeUnsupported, "the body is %s; send application/json", clip(header))
	}
	return nil
}

// isJSON says whether a Content-Type is JSON's.
func isJSON(header string) bool {
	mediaType, _, err := mime.ParseMediaType(header)
	return err == nil && mediaType == "application/json"
}

func tooLarge(most int64, want string) *problem.Problem {
	return problem.Newf(problem.BodyTooLarge, "the body is larger than the %d bytes that are allowed here; %s", most, want)
}

// bodyProblem says why a body could not be read to its end.
func bodyProblem(err error) *problem.Problem {
	var network net.Error
	if errors.As(err, &network) && network.Timeout() {
		return problem.New(problem.BodyTimeout, "the rest of the body did not come in time; send it without long pauses")
	}
	return problem.New(problem.BodyIncomplete, "the connection ended before the body did; nothing has changed; send it again")
}

// invalid is the Problem of one fault in a request.
func invalid(location, message, want string) *problem.Problem {
	return problem.Newf(problem.RequestInvalid, "%s: %s; %s", location, message, want).
		WithErrors(problem.FieldError{Location: location, Message: message, Hint: want})
}

// maxFaults bounds how many faults of one request are listed.
const maxFaults = 20

// problemTransformer makes a Problem of what huma itself finds wrong with a
// request. It is called for every answer.
func (a *API) problemTransformer(ctx huma.Context, _ string, v any) (any, error) {
	if _, ours := v.(*problem.Problem); ours {
		return v, nil
	}
	failure, ok := v.(huma.StatusError)
	if !ok {
		return v, nil
	}
	var details []*huma.ErrorDetail
	if model, ok := v.(*huma.ErrorModel); ok {
		details = model.Errors
	}
	p := a.faults(ctx.Operation(), failure.GetStatus(), failure.Error(), details).For(requestIDOf(ctx.Context()))
	for name, values := range p.GetHeaders() {
		ctx.SetHeader(name, values[0])
	}
	return p, nil
}

// faults is the Problem of a request that huma refused with that status.
func (a *API) faults(op *huma.Operation, status int, message string, details []*huma.ErrorDetail) *problem.Problem {
	switch {
	case status == http.StatusBadRequest && len(details) > 0:
		// It could not parse the body, which it finds out last.
		return problem.Newf(problem.JSONInvalid, "%s; send a JSON object", clip(details[len(details)-1].Message))
	case status != http.StatusUnprocessableEntity:
		return problem.New(problem.InternalError, "the node failed; its log has the cause")
	}
	p := problem.New(problem.RequestInvalid, message)
	for _, d := range details {
		if d == nil {
			continue
		}
		p.Errors = append(p.Errors, a.fault(op, d))
		if len(p.Errors) == maxFaults {
			break
		}
	}
	if len(p.Errors) > 0 {
		first := p.Errors[0]
		p.Detail = first.Location + ": " + first.Message
		if first.Hint != "" {
			p.Detail += "; " + first.Hint
		}
	}
	return p
}

// fault says one fault in our words, and what would be right.
func (a *API) fault(op *huma.Operation, d *huma.ErrorDetail) problem.FieldError {
	f := problem.FieldError{Location: clip(d.Location), Message: clip(d.Message)}
	parent, _, _ := cutLast(d.Location, ".")
	if name, ok := strings.CutPrefix(d.Message, "expected required property "); ok {
		name, _, _ = strings.Cut(name, " ")
		f.Location, f.Message = clip(d.Location+"."+name), "it is missing"
	}
	switch d.Message {
	case "unexpected property":
		f.Message = "unknown field"
		if names := a.fieldsAt(op, parent); len(names) > 0 {
			f.Hint = "the fields are " + strings.Join(names, ", ")
		}
	case "unknown query parameter":
		f.Message = "there is no such parameter"
		f.Hint = "this route has none"
		if names := queryNames(op); len(names) > 0 {
			f.Hint = "the parameters are " + strings.Join(names, ", ")
		}
	}
	return f
}

func cutLast(s, sep string) (before, after string, found bool) {
	if i := strings.LastIndex(s, sep); i >= 0 {
		return s[:i], s[i+len(sep):], true
	}
	return s, "", false
}

// fieldsAt lists the fields of the object at a path such as "body.rules[0].answer".
func (a *API) fieldsAt(op *huma.Operation, path string) []string {
	schema, _ := op.Metadata[bodySchemaKey].(*huma.Schema)
	for i, name := range strings.Split(path, ".") {
		if schema == nil {
			return nil
		}
		schema = a.resolve(schema)
		if i == 0 {
			continue
		}
		name, indexes, _ := strings.Cut(name, "[")
		schema = schema.Properties[name]
		for range strings.Count(indexes, "]") {
			if schema != nil {
				schema = a.resolve(schema).Items
			}
		}
	}
	if schema == nil {
		return nil
	}
	return slices.Sorted(maps.Keys(a.resolve(schema).Properties))
}

func (a *API) resolve(s *huma.Schema) *huma.Schema {
	for s.Ref != "" {
		s = a.huma.OpenAPI().Components.Schemas.SchemaFromRef(s.Ref)
	}
	return s
}

func queryNames(op *huma.Operation) []string {
	var names []string
	for _, p := range op.Parameters {
		if p.In == "query" {
			names = append(names, p.Name)
		}
	}
	return names
}

// parseJSON checks a body against a schema and decodes it, for handlers that
// read their body themselves.
func (a *API) parseJSON(schema *huma.Schema, body []byte, into any) error {
	var tree any
	if err := json.Unmarshal(body, &tree); err != nil {
		return problem.Newf(problem.JSONInvalid, "%v; send a JSON object", err)
	}
	if err := a.checkNames(schema, body); err != nil {
		return err
	}
	var result huma.ValidateResult
	path := huma.NewPathBuffer(nil, 0)
	path.Push("body")
	huma.Validate(a.huma.OpenAPI().Components.Schemas, schema, path, huma.ModeWriteToServer, tree, &result)
	if len(result.Errors) == 0 {
		if err := json.Unmarshal(body, into); err != nil {
			return problem.Newf(problem.RequestInvalid, "body: %v", err)
		}
		return nil
	}
	var details []*huma.ErrorDetail
	for _, err := range result.Errors {
		if d, ok := err.(huma.ErrorDetailer); ok {
			details = append(details, d.ErrorDetail())
		}
	}
	op := &huma.Operation{Metadata: map[string]any{bodySchemaKey: schema}}
	return a.faults(op, http.StatusUnprocessableEntity, "the body is not valid", details)
}
