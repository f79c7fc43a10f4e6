// Preact with HTM: `html` turns template literals into virtual DOM nodes.
import { h, render } from "preact";
import htm from "htm";

export const html = htm.bind(h);
export { render };
export { Component, Fragment, createContext } from "preact";
export {
  useCallback,
  useContext,
  useEffect,
  useLayoutEffect,
  useMemo,
  useReducer,
  useRef,
  useState,
} from "preact/hooks";
