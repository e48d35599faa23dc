package api

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
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

	"github.com/doze-run/doze/problem"
)

const (
	// maxJSON limits a JSON body, maxFileJSON one that contains a file. Larger files are
	// sent as raw bytes.
	maxJSON     = 1 << 20
	maxFileJSON = 4 << 20
	// smallBody is the size of a body up to which a request does not count as a call.
	smallBody = 64 << 10
	// maxDepth limits how deep JSON is nested, as encoding/json does.
	maxDepth = 10_000
)

// sendRaw is the remedy for a JSON body that is too large.
const sendRaw = "send files as raw bytes"

// decodeBody reads the JSON body of a request and decodes it as decodeJSON does. A request
// whose body is not small counts as a call for each MiB that the body may have.
func (a *API) decodeBody(w http.ResponseWriter, r *http.Request, limit int64, schema *huma.Schema, into any) error {
	if err := checkType(r); err != nil {
		return err
	}
	if r.ContentLength < 0 || r.ContentLength > smallBody {
		if err := a.calls.acquire(r.Context(), limit/maxJSON); err != nil {
			return err
		}
	}
	body, err := a.readBody(w, r, limit, sendRaw)
	switch {
	case err != nil:
		return err
	case len(body) == 0:
		return problem.New(problem.JSONInvalid, "the body is empty; send a JSON object")
	case !utf8.Valid(body):
		return problem.New(problem.JSONInvalid, "the body is not UTF-8; JSON is (RFC 8259)")
	}
	return a.decodeJSON(schema, body, into)
}

// readBody returns a body of at most limit bytes. The remedy is for a larger one.
func (a *API) readBody(w http.ResponseWriter, r *http.Request, limit int64, remedy string) ([]byte, error) {
	if r.ContentLength > limit {
		return nil, tooLarge(limit, remedy)
	}
	var body bytes.Buffer
	body.Grow(int(max(0, r.ContentLength)) + bytes.MinRead) // otherwise it grows by copying
	_, err := body.ReadFrom(io.LimitReader(newTimedBody(w, r.Body, a.cfg.Limits.Stall), limit+1))
	switch {
	case err != nil:
		return nil, bodyProblem(err)
	case int64(body.Len()) > limit:
		return nil, tooLarge(limit, remedy)
	}
	return body.Bytes(), nil
}

// checkType refuses a body whose Content-Type is not JSON's.
func checkType(r *http.Request) error {
	if header := r.Header.Get("Content-Type"); header != "" && !isJSON(header) {
		return problem.Newf(problem.MediaTypeUnsupported, "the body is %s; send application/json", clip(header))
	}
	return nil
}

func isJSON(contentType string) bool { return hasType(contentType, "application/json") }

// hasType reports whether a Content-Type is valid and of a media type.
func hasType(contentType, mediaType string) bool {
	parsed, _, err := mime.ParseMediaType(contentType)
	return err == nil && parsed == mediaType
}

func tooLarge(limit int64, remedy string) *problem.Problem {
	return problem.Newf(problem.BodyTooLarge, "the body is larger than the %d bytes that are allowed here; %s", limit, remedy)
}

// bodyProblem returns the problem of a body that could not be read to its end.
func bodyProblem(err error) *problem.Problem {
	if refused, ok := errors.AsType[*problem.Problem](err); ok {
		return refused
	}
	if network, ok := errors.AsType[net.Error](err); ok && network.Timeout() {
		return problem.New(problem.BodyTimeout, "the rest of the body did not arrive in time; send it without long pauses")
	}
	return problem.New(problem.BodyIncomplete, "the connection ended before the body did; send it again")
}

// decodeJSON decodes JSON that its schema accepts. It refuses fields that would be
// ignored: the first of two with the same name, and names that encoding/json takes for a
// field of the schema because they differ in case only.
func (a *API) decodeJSON(schema *huma.Schema, text []byte, into any) error {
	p := jsonParser{api: a, tokens: json.NewDecoder(bytes.NewReader(text))}
	tree, err := p.document(schema)
	if err != nil {
		return err
	}
	var result huma.ValidateResult
	path := huma.NewPathBuffer(nil, 0)
	path.Push("body")
	huma.Validate(a.huma.OpenAPI().Components.Schemas, schema, path, huma.ModeWriteToServer, tree, &result)
	if len(result.Errors) > 0 {
		var faults []problem.FieldError
		for _, err := range result.Errors[:min(len(result.Errors), maxFaults)] {
			if detailed, ok := err.(huma.ErrorDetailer); ok {
				faults = append(faults, a.bodyFault(schema, detailed.ErrorDetail()))
			}
		}
		return problemOfFaults("the body is not valid", faults)
	}
	if err := json.Unmarshal(text, into); err != nil {
		return problem.Newf(problem.RequestInvalid, "body: %v", err)
	}
	return nil
}

// jsonParser parses JSON into the values that huma validates.
type jsonParser struct {
	api    *API
	tokens *json.Decoder
}

// anySchema is the schema of a value without one.
var anySchema = &huma.Schema{}

func (p *jsonParser) document(schema *huma.Schema) (any, error) {
	tree, err := p.value(schema, "body", 0)
	if err == nil {
		if _, err = p.tokens.Token(); err == io.EOF {
			return tree, nil
		}
		err = cmp.Or(err, errors.New("invalid data after the top-level value"))
	}
	if refused, ok := errors.AsType[*problem.Problem](err); ok {
		return nil, refused
	}
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		err = errors.New("unexpected end of JSON input")
	}
	return nil, problem.Newf(problem.JSONInvalid, "%s; send a JSON object", clip(err.Error()))
}

// value parses one value at a location, such as body.rules[0], at a depth of nesting. The
// schema is nil for a value that has none.
func (p *jsonParser) value(schema *huma.Schema, location string, depth int) (any, error) {
	token, err := p.tokens.Token()
	delim, nested := token.(json.Delim)
	if err != nil || !nested {
		return token, err
	}
	schema = p.api.resolve(cmp.Or(schema, anySchema))
	if depth == maxDepth && p.tokens.More() {
		return nil, fmt.Errorf("exceeded the maximum depth of %d", maxDepth)
	}
	list := []any{}
	var fields map[string]any
	if delim == '{' {
		fields = map[string]any{}
	}
	for p.tokens.More() {
		if delim == '[' {
			item, err := p.value(schema.Items, clip(location+"["+strconv.Itoa(len(list))+"]"), depth+1)
			if err != nil {
				return nil, err
			}
			list = append(list, item)
			continue
		}
		if err := p.field(schema, fields, location, depth); err != nil {
			return nil, err
		}
	}
	if _, err := p.tokens.Token(); err != nil {
		return nil, err
	}
	if delim == '[' {
		return list, nil
	}
	return fields, nil
}

// field parses a field of an object. It refuses a second one of a name, and a name that
// the schema has in another case.
func (p *jsonParser) field(schema *huma.Schema, fields map[string]any, location string, depth int) error {
	token, err := p.tokens.Token()
	if err != nil {
		return err
	}
	name := token.(string)
	location = clip(location + "." + clip(name))
	if _, twice := fields[name]; twice {
		return invalid(location, "duplicate field", "send it once")
	}
	if schema.Properties[name] == nil {
		for known := range schema.Properties {
			if strings.EqualFold(known, name) {
				return invalid(location, "unknown field", listFields(schema))
			}
		}
	}
	fields[name], err = p.value(schema.Properties[name], location, depth+1)
	return err
}

func listFields(schema *huma.Schema) string {
	return "the fields are " + strings.Join(slices.Sorted(maps.Keys(schema.Properties)), ", ")
}

// bodyFault converts one fault that huma found in a body.
func (a *API) bodyFault(schema *huma.Schema, d *huma.ErrorDetail) problem.FieldError {
	f := problem.FieldError{Location: clip(d.Location), Message: clip(d.Message)}
	if name, ok := strings.CutPrefix(d.Message, "expected required property "); ok {
		name, _, _ = strings.Cut(name, " ")
		f.Location, f.Message = clip(d.Location+"."+name), "missing"
	}
	if d.Message == "unexpected property" {
		f.Message = "unknown field"
		if object := a.schemaAt(schema, d.Location[:max(0, strings.LastIndex(d.Location, "."))]); object != nil && len(object.Properties) > 0 {
			f.Hint = listFields(object)
		}
	}
	return f
}

// schemaAt returns the schema at a path such as "body.rules[0].respond", or nil.
func (a *API) schemaAt(schema *huma.Schema, path string) *huma.Schema {
	schema = a.resolve(schema)
	for _, name := range strings.Split(path, ".")[1:] {
		name, indexes, _ := strings.Cut(name, "[")
		schema = schema.Properties[name]
		for range strings.Count(indexes, "]") {
			if schema != nil {
				schema = a.resolve(schema).Items
			}
		}
		if schema == nil {
			return nil
		}
		schema = a.resolve(schema)
	}
	return schema
}

func (a *API) resolve(s *huma.Schema) *huma.Schema {
	for s.Ref != "" {
		s = a.huma.OpenAPI().Components.Schemas.SchemaFromRef(s.Ref)
	}
	return s
}
