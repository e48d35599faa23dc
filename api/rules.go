package api

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"strings"

	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/egress/rule"
	"github.com/doze-run/doze/egress/rule/ruleset"
	"github.com/doze-run/doze/problem"
	"github.com/doze-run/doze/runtime/sandbox"
)

type rulesOutput struct {
	ETag string `header:"ETag"`
	Body types.RuleSet
}

type setSandboxRulesInput struct {
	SandboxPath
	RulesCondition
}

// RulesCondition is the part of a request's input with the revision of the rules to replace.
type RulesCondition struct {
	IfMatch string `header:"If-Match" maxLength:"64" doc:"The ETag of the rules to replace. If they have changed, the response is 412"`
}

func (a *API) registerRules() {
	const described = "Applies to the next request of each sandbox. Invalid rules change nothing. " +
		"Send the ETag as If-Match to replace only rules that you have read."
	codes := []problem.Code{problem.RulesInvalid, problem.RevisionConflict, problem.NodeDiskFull}
	register(a, route{
		method: http.MethodGet, path: "/node/egress/rules", id: "get-node-rules", tag: "egress",
		summary: "Get the rules of the node", description: "They come before all others. Only the node's Caddyfile changes them.",
	}, a.nodeRules)
	register(a, route{
		method: http.MethodGet, path: "/egress/presets", id: "list-presets", tag: "egress",
		summary: "List presets", description: "Presets are named lists of hosts: a rule names one as `preset:github` among its hosts. Some are part of doze, others are defined by the node's operator.",
	}, a.presets)
	register(a, route{
		method: http.MethodGet, path: "/egress/rules", id: "get-rules", tag: "egress",
		summary: "Get your rules, for all of your sandboxes", description: "They come after the node's. The ETag is their revision.",
	}, func(ctx context.Context, _ *struct{}) (*rulesOutput, error) { return a.rules(ctx, "") })
	registerBody(a, route{
		method: http.MethodPut, path: "/egress/rules", id: "set-rules", tag: "egress",
		summary: "Replace your rules", description: described, codes: codes,
	}, func(ctx context.Context, in *RulesCondition, body *types.SetRulesRequest) (*rulesOutput, error) {
		return a.setRules(ctx, "", body, in.IfMatch)
	})
	register(a, route{
		method: http.MethodGet, path: "/sandbox/{id}/egress/rules", id: "get-sandbox-rules", tag: "egress",
		summary: "Get the rules of a sandbox", description: "They come after the node's and yours. Never wakes the sandbox.",
	}, withSandbox(a, func(ctx context.Context, _ *SandboxPath, sb sandbox.Sandbox) (*rulesOutput, error) {
		return a.rules(ctx, sb.ID)
	}))
	registerBody(a, route{
		method: http.MethodPut, path: "/sandbox/{id}/egress/rules", id: "set-sandbox-rules", tag: "egress",
		summary: "Replace the rules of a sandbox", description: described + " Never wakes the sandbox.", codes: codes,
	}, withSandboxBody(a, func(ctx context.Context, in *setSandboxRulesInput, body *types.SetRulesRequest, sb sandbox.Sandbox) (*rulesOutput, error) {
		return a.setRules(ctx, sb.ID, body, in.IfMatch)
	}))
}

func (a *API) presets(context.Context, *struct{}) (*output[types.PresetList], error) {
	return respond(types.PresetList{Presets: listOf(a.cfg.Egress.Presets(), presetOf)})
}

func (a *API) nodeRules(context.Context, *struct{}) (*output[types.NodeRules], error) {
	def, rules := a.cfg.Egress.NodeRules()
	return respond(types.NodeRules{Default: types.RuleDefault(def), Rules: listOf(rules, ruleTo)})
}

// rules responds with the rules of a sandbox, or if the id is empty with the owner's.
func (a *API) rules(ctx context.Context, id sandbox.ID) (*rulesOutput, error) {
	return respondRules(a.cfg.Egress.Rules(ctx, ownerOf(ctx), id))
}

func (a *API) setRules(ctx context.Context, id sandbox.ID, body *types.SetRulesRequest, ifMatch string) (*rulesOutput, error) {
	revision, err := parseRevision(ifMatch)
	if err != nil {
		return nil, err
	}
	rules, err := RulesOf(body.Rules)
	if err != nil {
		return nil, err
	}
	return respondRules(a.cfg.Egress.SetRules(ctx, ownerOf(ctx), id, ruleset.Update{Default: rule.Default(body.Default), Rules: rules, IfRevision: revision}))
}

// respondRules responds with the result of a call that returns rules.
func respondRules(set ruleset.Set, warnings []rule.Warning, err error) (*rulesOutput, error) {
	return &rulesOutput{ETag: strconv.Quote(strconv.FormatInt(set.Revision, 10)), Body: ruleSetOf(set, warnings)}, err
}

// parseRevision parses If-Match (RFC 9110, section 13.1.1). None and * mean any revision.
func parseRevision(ifMatch string) (*int64, error) {
	ifMatch = strings.TrimSpace(ifMatch)
	if ifMatch == "" || ifMatch == "*" {
		return nil, nil
	}
	text, quoted := strings.CutPrefix(ifMatch, `"`)
	text, closed := strings.CutSuffix(text, `"`)
	revision, err := strconv.ParseInt(text, 10, 64)
	if !quoted || !closed || err != nil || revision < 0 {
		return nil, invalid("header.If-Match", clip(ifMatch)+" is not an ETag of rules", `send the ETag of the response with the rules, such as "7" with its quotes`)
	}
	return &revision, nil
}

// problemOfRules returns the problem of invalid rules, with the location of each fault.
func problemOfRules(err error) *problem.Problem {
	faults := ruleErrors(err)
	p := problem.New(problem.RulesInvalid, faults[0].Error())
	if more := len(faults) - 1; more > 0 {
		p.Detail += fmt.Sprintf("; and %d more", more)
	}
	for _, fault := range faults[:min(len(faults), maxFaults)] {
		p.Errors = append(p.Errors, problem.FieldError{Location: fmt.Sprintf("body.rules[%d].%s", fault.Index, fault.Field), Message: fault.Problem})
	}
	return p
}

// ruleErrors returns the errors of rules that err joins and wraps.
func ruleErrors(err error) []*rule.Error {
	switch e := err.(type) {
	case *rule.Error:
		return []*rule.Error{e}
	case interface{ Unwrap() []error }:
		var all []*rule.Error
		for _, one := range e.Unwrap() {
			all = append(all, ruleErrors(one)...)
		}
		return all
	}
	if err = errors.Unwrap(err); err != nil {
		return ruleErrors(err)
	}
	return nil
}
