package api

import (
	"context"
	"fmt"
	"maps"
	"net/http"
	"reflect"
	"slices"
	"strconv"
	"strings"

	"github.com/danielgtaylor/huma/v2"
	"github.com/danielgtaylor/huma/v2/adapters/humago"

	"github.com/doze-run/doze/problem"
	"github.com/doze-run/doze/runtime/sandbox"
)

// route describes one operation, for the mux and for the OpenAPI document.
type route struct {
	method, path string
	id           string // the OpenAPI operation id
	tag          string
	summary      string
	description  string
	status       int // of success; 0 means 200, or 204 without a body
	// codes are the problems that this route can respond with, in addition to common ones.
	codes []problem.Code
	// open routes need no token.
	open bool
	// signed routes also accept a signed URL in place of a token. Their input has a
	// SignedQuery.
	signed bool
	// unsigned are the parameters that the bearer of a signed URL may choose.
	unsigned []string
	// responses describes successes that are not derived from the output type.
	responses map[int]*huma.Response
	// events are the data of the server-sent events, by name, that the route can respond
	// with, in addition to problems.
	events map[string]any
}

// commonCodes can come from any route that needs a token.
var commonCodes = []problem.Code{problem.Unauthorized, problem.RequestInvalid, problem.URITooLong, problem.NodeUnavailable, problem.DescriptorsExhausted, problem.InternalError}

// bodyCodes can come from any route: without a body of its own, it refuses bodies.
var bodyCodes = []problem.Code{problem.JSONInvalid, problem.MediaTypeUnsupported, problem.BodyTooLarge, problem.BodyIncomplete, problem.BodyTimeout}

// wakeCodes can come from any route that wakes a sandbox.
var wakeCodes = slices.Concat(retrievalCodes, []problem.Code{problem.SandboxDestroyed, problem.WaiterLimitExceeded, problem.WakeFailed, problem.EngineUnavailable, problem.NodeDiskFull,
	problem.GuestLost, problem.GuestError, problem.SandboxTimeout})

// retrievalCodes can come from any route that needs the disk of an archived sandbox.
var retrievalCodes = []problem.Code{problem.ObjectStoreRequired, problem.ObjectStoreFailed, problem.BackupUnreadable, problem.ImageMismatch}

// SandboxPath is the part of a request's input that names a sandbox.
type SandboxPath struct {
	ID string `path:"id" maxLength:"255" doc:"Id or name of the sandbox"`
}

func (p SandboxPath) target() string { return p.ID }

// Exchange is the part of a request's input that contains the request and the response
// writer, for bodies and responses of any size.
type Exchange struct {
	r *http.Request
	w http.ResponseWriter
}

// Resolve implements huma.Resolver.
func (e *Exchange) Resolve(ctx huma.Context) []error {
	e.r, e.w = humago.Unwrap(ctx)
	return nil
}

// sandboxExchange is the input of a route of a sandbox whose other parameters are in its body.
type sandboxExchange struct {
	SandboxPath
	Exchange
}

// newHuma returns a huma.API on the mux. It serves no document of its own, and its errors
// are problems. Huma's package variables are not set: another part of the program may
// use huma too.
func (a *API) newHuma() huma.API {
	return humago.NewWithPrefix(a.mux, Prefix, huma.Config{
		OpenAPI: &huma.OpenAPI{Components: &huma.Components{Schemas: newSchemas()}},
		// Huma finds the format of application/problem+json by its suffix.
		Formats:                      map[string]huma.Format{"application/json": jsonFormat, "json": jsonFormat},
		DefaultFormat:                "application/json",
		RejectUnknownQueryParameters: true,
		Transformers:                 []huma.Transformer{a.problemTransformer},
	})
}

// register adds a route without a JSON body. I and O are as huma.Register wants them;
// handler may return any error of the runtime.
func register[I, O any](a *API, rt route, handler func(context.Context, *I) (*O, error)) {
	rt.codes = slices.Concat(rt.codes, bodyCodes)
	addRoute(a, rt, nil, handler)
}

// registerBody adds a route with a JSON body of type B.
func registerBody[I, B, O any](a *API, rt route, handler func(context.Context, *I, *B) (*O, error)) {
	rt.codes = slices.Concat(rt.codes, bodyCodes, []problem.Code{problem.CallLimitExceeded})
	schema := a.schema(reflect.TypeFor[B]())
	addRoute(a, rt, &huma.RequestBody{Content: map[string]*huma.MediaType{"application/json": {Schema: schema}}}, func(ctx context.Context, in *I) (*O, error) {
		body := new(B)
		c := callOf(ctx)
		if err := a.decodeBody(c.w, c.routed, maxJSON, schema, body); err != nil {
			return nil, err
		}
		return handler(ctx, in, body)
	})
}

// addRoute adds a route to the mux and to the OpenAPI document. The body describes what
// the handler itself reads, by its type; without one the route refuses bodies.
func addRoute[I, O any](a *API, rt route, body *huma.RequestBody, handler func(context.Context, *I) (*O, error)) {
	op := huma.Operation{
		OperationID:   rt.id,
		Method:        rt.method,
		Path:          rt.path,
		Summary:       rt.summary,
		Description:   rt.description,
		Tags:          []string{rt.tag},
		Security:      []map[string][]string{}, // none, for open routes
		DefaultStatus: rt.status,
		Responses:     map[string]*huma.Response{},
		Middlewares:   huma.Middlewares{a.checkQuery},
	}
	codes := rt.codes
	if strings.HasPrefix(rt.path, "/sandbox/{id}") {
		codes = slices.Concat([]problem.Code{problem.SandboxNotFound}, codes)
	}
	if !rt.open {
		codes = slices.Concat(codes, commonCodes)
		op.Security = []map[string][]string{{securityScheme: {}}}
	}
	if rt.signed {
		codes = slices.Concat(codes, signedCodes)
		op.Security = append(op.Security, map[string][]string{signatureScheme: {}})
		a.signed[rt.method+" "+Prefix+rt.path] = signedRoute{rt.id, rt.unsigned}
	}
	if body == nil {
		op.Middlewares = append(op.Middlewares, a.refuseBody)
	}
	a.documentProblems(&op, codes)
	for status, response := range rt.responses {
		op.Responses[strconv.Itoa(status)] = response
	}
	if rt.events != nil {
		rt.events["problem"] = problem.Problem{}
		op.Responses["200"].Content[eventStreamType] = a.eventSchema(rt.events)
	}
	huma.Register(a.huma, op, func(ctx context.Context, in *I) (*O, error) {
		callOf(ctx).operation = rt.id
		out, err := handler(ctx, in)
		if err != nil {
			return nil, a.refuse(ctx, err)
		}
		return out, nil
	})
	if body != nil {
		// Set afterwards, because huma reads bodies that it knows of into memory.
		body.Required = true
		a.documented(rt.method, rt.path).RequestBody = body
	}
}

// documented returns the operation of a route in the OpenAPI document, or nil.
func (a *API) documented(method, path string) *huma.Operation {
	item := a.huma.OpenAPI().Paths[path]
	if item == nil {
		return nil
	}
	return map[string]*huma.Operation{
		http.MethodGet: item.Get, http.MethodPut: item.Put, http.MethodPost: item.Post, http.MethodPatch: item.Patch, http.MethodDelete: item.Delete,
	}[method]
}

// onSandboxPath is the input of a route with the path of a sandbox.
type onSandboxPath interface{ target() string }

// withSandbox adapts a handler that needs the sandbox in the path of its route.
func withSandbox[I any, O any](a *API, handler func(context.Context, *I, sandbox.Sandbox) (*O, error)) func(context.Context, *I) (*O, error) {
	return func(ctx context.Context, in *I) (*O, error) {
		sb, err := a.lookup(ctx, any(in).(onSandboxPath).target())
		if err != nil {
			return nil, err
		}
		return handler(ctx, in, sb)
	}
}

// withSandboxBody is withSandbox for a route with a JSON body.
func withSandboxBody[I, B, O any](a *API, handler func(context.Context, *I, *B, sandbox.Sandbox) (*O, error)) func(context.Context, *I, *B) (*O, error) {
	return func(ctx context.Context, in *I, body *B) (*O, error) {
		sb, err := a.lookup(ctx, any(in).(onSandboxPath).target())
		if err != nil {
			return nil, err
		}
		return handler(ctx, in, body, sb)
	}
}

// documentProblems puts the codes into the operation, grouped by status.
func (a *API) documentProblems(op *huma.Operation, codes []problem.Code) {
	byStatus := map[int][]string{}
	for _, code := range codes {
		status := code.Definition().Status
		if !slices.Contains(byStatus[status], code.String()) {
			byStatus[status] = append(byStatus[status], code.String())
		}
	}
	all := []string{}
	for _, status := range slices.Sorted(maps.Keys(byStatus)) {
		list := byStatus[status]
		all = append(all, list...)
		op.Responses[strconv.Itoa(status)] = &huma.Response{
			Description: "Problem: `" + strings.Join(list, "`, `") + "`",
			Content:     map[string]*huma.MediaType{problem.ContentType: {Schema: a.schema(reflect.TypeFor[problem.Problem]())}},
		}
	}
	op.Extensions = map[string]any{codesExtension: all}
}

// schema returns a reference to the JSON schema of a type.
func (a *API) schema(t reflect.Type) *huma.Schema {
	return a.huma.OpenAPI().Components.Schemas.Schema(t, true, t.Name())
}

// responseJSON describes a success with a JSON body of type T.
func responseJSON[T any](a *API, description string) *huma.Response {
	return &huma.Response{
		Description: description,
		Content:     map[string]*huma.MediaType{"application/json": {Schema: a.schema(reflect.TypeFor[T]())}},
	}
}

// responseBytes describes a success with a raw body.
func responseBytes(description, contentType string) *huma.Response {
	return &huma.Response{Description: description, Content: rawContent(contentType)}
}

func rawContent(contentType string) map[string]*huma.MediaType {
	return map[string]*huma.MediaType{contentType: {Schema: &huma.Schema{Type: huma.TypeString, Format: "binary"}}}
}

// eventsOf returns the events that have the values of an enumeration as names, each with
// data of the same type.
func eventsOf[E enumeration[E]](data any) map[string]any {
	events := map[string]any{}
	for _, name := range E("").Values() {
		events[string(name)] = data
	}
	return events
}

// eventSchema describes a server-sent event stream: the data of each event.
func (a *API) eventSchema(data map[string]any) *huma.MediaType {
	var kinds []*huma.Schema
	for _, name := range slices.Sorted(maps.Keys(data)) {
		kinds = append(kinds, &huma.Schema{
			Type:  huma.TypeObject,
			Title: "event " + name,
			Properties: map[string]*huma.Schema{
				"event": {Type: huma.TypeString, Enum: []any{name}},
				"data":  a.schema(reflect.TypeOf(data[name])),
			},
			Required: []string{"event", "data"},
		})
	}
	return &huma.MediaType{Schema: &huma.Schema{
		Description: fmt.Sprintf("Server-sent events (%d kinds); the data of each is one line of JSON.", len(kinds)),
		Type:        huma.TypeArray,
		Items:       &huma.Schema{OneOf: kinds},
	}}
}
