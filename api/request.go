package api

import (
	"bytes"
	"net/http"
	"strings"

	"github.com/danielgtaylor/huma/v2"
	"github.com/danielgtaylor/huma/v2/adapters/humago"

	"github.com/doze-run/doze/problem"
)

// refuseBody is the middleware of routes without a body, which would ignore one. An empty
// object has no fields to ignore. The length of a body may be unknown, as it always is in
// HTTP/3: then only reading shows whether there is one.
func (a *API) refuseBody(ctx huma.Context, next func(huma.Context)) {
	r, w := humago.Unwrap(ctx)
	if r.ContentLength == 0 {
		next(ctx)
		return
	}
	body, err := a.readBody(w, r, smallBody, "send no body")
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

// checkQuery is the middleware that refuses parameters which would be ignored: the second
// of two, and one without a value. An empty cursor requests the first page.
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
			fault = invalid("query."+p.Name, "duplicate parameter", "send it once")
		case values[0] == "" && p.Name != "cursor":
			fault = invalid("query."+p.Name, "empty", "send a value, or omit the parameter")
		}
		if fault != nil {
			fault.Write(w, r)
			return
		}
	}
	next(ctx)
}

// invalid returns the problem of one fault in a request.
func invalid(location, message, want string) *problem.Problem {
	return problem.Newf(problem.RequestInvalid, "%s: %s; %s", location, message, want).
		WithErrors(problem.FieldError{Location: location, Message: message, Hint: want})
}

// maxFaults limits how many faults of one request are listed.
const maxFaults = 20

// problemOfFaults returns the problem of all faults of a request. Its detail is the first
// of them, or else detail.
func problemOfFaults(detail string, faults []problem.FieldError) *problem.Problem {
	p := problem.New(problem.RequestInvalid, detail)
	p.Errors = faults[:min(len(faults), maxFaults)]
	if len(faults) > 0 {
		p.Detail = faults[0].Location + ": " + faults[0].Message
		if faults[0].Hint != "" {
			p.Detail += "; " + faults[0].Hint
		}
	}
	return p
}

// problemTransformer makes a problem of the errors that huma finds in the parameters of a
// request. Huma calls it for every response.
func (a *API) problemTransformer(ctx huma.Context, _ string, v any) (any, error) {
	if _, ours := v.(*problem.Problem); ours {
		return v, nil
	}
	failure, ok := v.(huma.StatusError)
	if !ok {
		return v, nil
	}
	p := problem.New(problem.InternalError, "the node failed; its log has the cause")
	if model, ok := v.(*huma.ErrorModel); ok && failure.GetStatus() == http.StatusUnprocessableEntity {
		var faults []problem.FieldError
		for _, detail := range model.Errors {
			faults = append(faults, parameterFault(ctx.Operation(), detail))
		}
		p = problemOfFaults(failure.Error(), faults)
	}
	p = p.For(callOf(ctx.Context()).id)
	for name, values := range p.GetHeaders() {
		ctx.SetHeader(name, values[0])
	}
	return p, nil
}

// parameterFault converts one fault that huma found in the parameters of a request.
func parameterFault(op *huma.Operation, d *huma.ErrorDetail) problem.FieldError {
	f := problem.FieldError{Location: clip(d.Location), Message: clip(d.Message)}
	if d.Message == "unknown query parameter" {
		f.Message, f.Hint = "unknown parameter", "this route has none"
		var names []string
		for _, p := range op.Parameters {
			if p.In == "query" {
				names = append(names, p.Name)
			}
		}
		if len(names) > 0 {
			f.Hint = "the parameters are " + strings.Join(names, ", ")
		}
	}
	return f
}
